"""The HTML page: its sections, its top, its plots, and the page that follows runs that go on."""
