"""Show a run: header, progress, live display, closing report, HTML page."""
