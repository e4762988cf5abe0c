"""Mathematics that methods share: no masks to check, no models, plain tensors in and out."""
