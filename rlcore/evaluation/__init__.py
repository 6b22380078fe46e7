"""How a model did on held-out problems: results as they are kept, and their statistics with intervals. No torch."""
