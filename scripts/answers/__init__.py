"""How scripts/predict.py shows answers: as tables, and as pictures."""
