"""Show runs and forecasts as HTML pages: curves, events, configs, layouts. They need no network and trust no file."""
