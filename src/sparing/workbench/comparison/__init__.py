"""`sparing compare`: every method in the user's model, on the user's documents and machine."""
