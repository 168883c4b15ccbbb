"""HTML reports: each is one self-contained page."""
