"""`sparing plan`: choose a recipe for a tolerance on some documents, and check it on others."""
