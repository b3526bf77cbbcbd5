"""Files of a moved process: looked at, sent, kept by their content, and written only beneath agreed directories."""
