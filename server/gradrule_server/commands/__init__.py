"""Commands beside `serve`: for whoever runs a server, on its machine."""
