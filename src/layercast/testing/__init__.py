"""Law books and fakes, for backends inside and outside this tree. No other room imports it."""
