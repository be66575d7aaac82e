"""What an engine process may do at all, whatever a graph makes it do: held by the operating system."""
