"""Reading model checkpoints: configuration, weights by name, tokenizer."""
