"""Reports from records: terminal tables, HTML pages, CSV and JSON. The only folder that draws; free of torch."""
