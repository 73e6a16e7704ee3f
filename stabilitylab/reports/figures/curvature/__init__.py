"""What the loss around the parameters says of rates and depth."""
