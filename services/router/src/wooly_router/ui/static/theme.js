// Runs before the first paint, so that a page never flashes in the wrong theme.
"use strict";
(() => {
  const KEY = "wooly.theme";
  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is disabled: use the system's theme until the user chooses another
    }
  };
  const apply = (choice) => {
    const dark = choice === "dark" || (choice === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.documentElement.dataset.choice = choice;
  };
  window.woolyTheme = {
    choice: () => document.documentElement.dataset.choice,
    choose(choice) {
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // the choice applies to this page only
      }
      apply(choice);
    },
  };
  const first = stored();
  apply(first === "dark" || first === "light" ? first : "system");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(window.woolyTheme.choice()));
})();
