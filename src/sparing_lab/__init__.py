"""The laboratory: data sets, training, and the papers' tables and figures measured again."""
