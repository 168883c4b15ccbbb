"use strict";

// Light or dark theme: that of the system, until the reader switches it. Print is always light.
const theme = (() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const listeners = [];
  let chosen = remembered();
  let printing = false;
  let shown;

  function remembered() {
    try {
      return localStorage.getItem("paceline-theme");
    } catch {
      return null; // Some browsers have no storage for local files.
    }
  }

  const onPaper = () => printing || print.matches;

  function current() {
    return onPaper() ? "light" : chosen || (dark.matches ? "dark" : "light");
  }

  function apply() {
    const next = `${current()} ${onPaper()}`;
    if (next === shown) return;
    shown = next;
    root.dataset.theme = current();
    listeners.forEach((listener) => listener());
  }

  // Printing fires an event before the paper is laid out; a preview only matches the media query.
  function setPrinting(begins) {
    printing = begins;
    apply();
  }

  function toggle() {
    chosen = current() === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("paceline-theme", chosen);
    } catch {
      // Without storage, the choice lasts until the page is closed.
    }
    apply();
  }

  // Colours of a theme for the tokens in the plots, such as @ink.
  function colours(name = current()) {
    const before = root.dataset.theme;
    root.dataset.theme = name;
    const style = getComputedStyle(root);
    const read = (property) => style.getPropertyValue(property).trim();
    const found = { "@ink": read("--ink"), "@muted": read("--muted"), "@grid": read("--grid"), "@paper": read("--paper") };
    root.dataset.theme = before;
    return found;
  }

  apply();
  dark.addEventListener("change", apply);
  print.addEventListener("change", apply);
  addEventListener("beforeprint", () => setPrinting(true));
  addEventListener("afterprint", () => setPrinting(false));
  document.getElementById("theme").addEventListener("click", toggle);
  return { colours, onPaper, whenChanged: (listener) => listeners.push(listener) };
})();
