"""`sparing plan`: from a tolerance to a recipe, chosen on some documents and checked on others."""
