// Runs before anything is painted, so that a chosen theme does not flash.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage: the system's theme it is.
}
