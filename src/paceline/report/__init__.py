"""Records in, tables and pages out. The only place that draws; free of torch."""
