// Applies the chosen theme before the first paint. A module would run too late, and the policy of the page forbids inline scripts.
try {
  const theme = localStorage.getItem("gradrule-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is turned off: the page follows the system.
}
