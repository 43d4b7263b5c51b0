"""`cactus-hf bench`: how fast each way to decode is on a pair of models, and where the time goes."""
