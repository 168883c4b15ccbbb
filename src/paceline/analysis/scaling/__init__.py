"""How strategies scale: curves over ranks, what ranks compute on, and notes for the reader."""
