"""What becomes of a run: its file, tables, pictures, and how it compares with another."""
