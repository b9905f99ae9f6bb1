"""`pods plan`: which n and m have the most signal a second. Measures real steps, then simulates the signal."""
