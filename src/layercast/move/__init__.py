"""Device copies: movers and gates, each behind one base. Knows pieces, not requests or keys."""
