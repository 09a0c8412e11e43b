"""Parameter symmetries of neural networks."""
