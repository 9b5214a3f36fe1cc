"""Training and calibration: models, tokenizers and quantized folders, made from text."""
