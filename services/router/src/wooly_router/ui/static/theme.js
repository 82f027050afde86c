// Runs before anything is painted, so that no page flashes in the other theme.
"use strict";
(() => {
  const KEY = "wooly.theme";
  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is shut off: the system's theme, until another is chosen here
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
        // it holds for this page
      }
      apply(choice);
    },
  };
  const first = stored();
  apply(first === "dark" || first === "light" ? first : "system");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(window.woolyTheme.choice()));
})();
