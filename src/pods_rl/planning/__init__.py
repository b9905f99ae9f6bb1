"""Plans: which n and m have the most signal a second."""
