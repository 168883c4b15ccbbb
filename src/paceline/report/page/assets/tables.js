// Sortable tables, tooltips with definitions, and copy buttons.

const sortTable = (() => {
  const value = (row, place) => {
    const text = row.cells[place].dataset.sort;
    if (text === undefined) return null;
    const number = Number(text);
    return text === "" || Number.isNaN(number) ? text : number;
  };

  // Rows without a value stay last in both directions.
  function order(one, other, way) {
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one === "number" && typeof other === "number") return way * (one - other);
    return way * String(one).localeCompare(String(other));
  }

  return (heading) => {
    const table = heading.closest("table");
    const place = heading.cellIndex;
    const way = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) {
      if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    }
    heading.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((one, other) => order(value(one, place), value(other, place), way));
    table.tBodies[0].append(...rows);
    table.classList.add("sorted");
  };
})();

for (const button of document.querySelectorAll("table.sortable .sort")) {
  button.addEventListener("click", () => sortTable(button.closest("th")));
}

// A table that is wider than its area breaks its intervals over two lines if that is enough; otherwise a hint is above it.
for (const region of document.querySelectorAll(".scroll")) {
  const hint = document.createElement("p");
  hint.className = "sideways";
  hint.textContent = "Scroll the table sideways to see all columns.";
  hint.hidden = true;
  region.before(hint);
  const isWider = () => region.scrollWidth > region.clientWidth;
  const update = () => {
    region.classList.remove("tight");
    if (isWider()) region.classList.add("tight");
    if (isWider()) region.classList.remove("tight");
    hint.hidden = !isWider();
  };
  new ResizeObserver(update).observe(region);
  update();
}

// One tooltip for all definitions, outside the tables, so that none of them clips it.
(() => {
  const tip = document.getElementById("tip");
  let owner = null;

  function show(element) {
    owner = element;
    const definition = document.getElementById(element.getAttribute("aria-describedby"));
    const term = document.createElement("strong");
    term.textContent = definition.previousElementSibling.textContent;
    tip.replaceChildren(term, definition.textContent);
    tip.hidden = false;
    place(element.getBoundingClientRect());
  }

  function place(box) {
    const width = document.documentElement.clientWidth;
    const left = Math.min(Math.max(12, box.left), width - tip.offsetWidth - 12);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 56 ? above : box.bottom + 12}px`;
  }

  function hide() {
    owner = null;
    tip.hidden = true;
  }

  for (const element of document.querySelectorAll("[data-define]")) {
    element.addEventListener("mouseenter", () => show(element));
    element.addEventListener("focus", () => show(element));
    element.addEventListener("blur", hide);
    element.addEventListener("mouseleave", (event) => {
      if (event.relatedTarget !== tip && document.activeElement !== element) hide();
    });
  }
  tip.addEventListener("mouseleave", () => {
    if (document.activeElement !== owner) hide();
  });
  const follow = () => owner && place(owner.getBoundingClientRect());
  addEventListener("scroll", follow, { passive: true, capture: true });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
})();

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // Without access to the clipboard, select the text so that the user can copy it.
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });
}
