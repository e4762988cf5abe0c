"""From a tolerance to a recipe: which layer runs what, chosen on some documents and checked on others."""
