"""Plots of the page: pure functions from a comparison to plotly's data and layout."""
