"""Parts of the dashboard."""
