"""Who has which row, and which pages of it may go to others."""
