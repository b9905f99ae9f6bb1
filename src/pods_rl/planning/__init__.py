"""`pods plan`: which n and m are predicted to learn fastest. Measures real steps, then simulates the signal."""
