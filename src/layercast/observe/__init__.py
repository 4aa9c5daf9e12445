"""What happened: receipts, timelines and pictures. Knows no other room."""
