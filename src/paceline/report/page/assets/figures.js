// Draws the plots, adapts their colours to the theme, adds controls, and saves plots as images.

const NARROW = 560;
const MEDIUM = 860;
const SIZES = ["layout", "medium", "narrow"]; // Layouts of a view; a narrower one overrides parts of the wider one.
const SAVED_WIDTH = 1100;
const MOST_BUTTONS = 8;
const PAPER_WIDTH = 690; // Fits A4 and Letter; the browser lays out the paper too late to measure it.
const FONT = getComputedStyle(document.body).fontFamily;
const content = JSON.parse(document.getElementById("data").textContent);

class Figure {
  constructor(element, spec) {
    this.element = element;
    this.spec = spec;
    this.plot = element.querySelector(".plot");
    this.hidden = new Set();
    this.repeat = 0;
    const axes = spec.axes || [null];
    this.axis = axes.find((axis) => axis && axis.label === spec.first_axis) || axes[0];
    this.view = (spec.views || [null])[0];
    this.range = null; // The zoomed range of the horizontal axis.
    this.addControls(element.querySelector(".controls"));
    for (const button of element.querySelectorAll("[data-save]")) {
      button.addEventListener("click", () => this.save(button.dataset.save));
    }
    this.draw();
    if (spec.zoom) this.listen();
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  // The plot's current data and layout, in the colours of a theme.
  contents(colours, width) {
    const { narrow, medium, layout: wide } = this.spec;
    const layout = structuredClone((width < NARROW && narrow) || (width < MEDIUM && medium) || wide);
    const data = structuredClone(this.traces()).map((trace, index) => this.shown(trace, index));
    if (this.view) Object.assign(layout, ...[true, width < MEDIUM, width < NARROW].map((fits, place) => fits && structuredClone(this.view[SIZES[place]])));
    if (this.spec.zoom) layout.dragmode = width < NARROW ? false : "zoom"; // On a phone, dragging must scroll the page.
    if (this.range) layout.xaxis.range = [...this.range];
    if (this.axis) layout.xaxis.title.text = this.axis.title;
    if (this.axis && this.axis !== this.spec.axes[0]) delete layout.xaxis.dtick; // Ticks at whole numbers are for steps only.
    if (this.spec.scales) layout.yaxis = structuredClone(this.spec.scales[this.repeat]);
    layout.font.family = FONT;
    layout.hoverlabel.font.family = FONT;
    return { data: recoloured(data, colours), layout: recoloured(layout, colours) };
  }

  // A view combines some of the plot's sets of traces, each on its own y axis.
  traces() {
    if (!this.view) return this.spec.data;
    return this.view.sets.flatMap(([number, yaxis]) => this.spec.sets[number].map((trace) => ({ ...trace, yaxis })));
  }

  shown(trace, index) {
    const { candidates, repeats } = this.spec;
    if (this.axis) {
      trace.x = this.axis.x[index];
      trace.line.dash = this.axis.dashes[index];
    }
    if (repeats) {
      trace.visible = this.repeat === "all" || repeats[index] === this.repeat;
      if (this.repeat === "all") {
        trace.opacity = 0.55;
        trace.line.width = 1;
        trace.line.dash = "solid";
      }
    }
    if (candidates && this.hidden.has(candidates[index])) trace.visible = false;
    return trace;
  }

  get width() {
    return theme.onPaper() ? PAPER_WIDTH : this.plot.clientWidth;
  }

  draw() {
    this.drawnWidth = this.width;
    const { data, layout } = this.contents(theme.colours(), this.width);
    layout.width = this.width;
    return Plotly.react(this.plot, data, layout, { displayModeBar: false, responsive: false, doubleClick: false });
  }

  resize() {
    if (this.width > 0 && this.width !== this.drawnWidth) this.draw();
  }

  addControls(place) {
    if (this.spec.axes) place.append(this.axisSwitch());
    const repeats = [...new Set(this.spec.repeats || [])].sort((a, b) => a - b);
    if (repeats.length > 1) place.append(this.repeatChoice(repeats));
    if (this.spec.views) this.addViews(place);
    if (this.spec.zoom) place.append(this.zoomButtons());
    if (this.spec.candidates) place.append(this.legend());
    if (this.spec.keys) place.append(this.keys());
  }

  // Two controls: the group of views (buttons, or a list of many), and the view within the group.
  addViews(place) {
    const groups = [...new Set(this.spec.views.map((view) => view.group))];
    const labels = make("span", { className: "choice" });
    const choose = (view) => {
      this.view = view;
      this.range = null;
      const own = this.spec.views.filter(({ group }) => group === view.group);
      labels.replaceChildren(...(own.length > 1 ? [choice("View", own.map(({ label }) => label), view.label, pick)] : []));
      if (this.drawnWidth) this.draw();
    };
    const of = (group) => this.spec.views.filter((view) => view.group === group);
    const pick = (label) => choose(of(this.view.group).find((view) => view.label === label));
    const turnTo = (group) => choose(of(group).find(({ label }) => label === this.view.label) || of(group)[0]);
    if (groups.length > 1) place.append(choice("Strategy", groups, this.view.group, turnTo));
    place.append(labels);
    choose(this.view);
  }

  zoomButtons() {
    const group = make("div", { className: "switch zoom", role: "group", ariaLabel: "Zoom" });
    const whole = () => this.view.layout.xaxis.range;
    // Keeps the centre, and stays inside the whole range.
    const zoom = (factor, shift = 0) => {
      const [low, high] = this.range || whole();
      const length = Math.min((high - low) * factor, whole()[1] - whole()[0]);
      const start = (low + high - length) / 2 + shift * length;
      const first = Math.max(whole()[0], Math.min(start, whole()[1] - length));
      this.range = [first, first + length];
      this.draw();
    };
    const buttons = [
      ["−", "Zoom out", () => zoom(2)],
      ["+", "Zoom in", () => zoom(0.5)],
      ["←", "Earlier", () => zoom(1, -0.4)],
      ["→", "Later", () => zoom(1, 0.4)],
      ["reset", "Show the whole step", () => ((this.range = null), this.draw())],
    ];
    for (const [text, label, act] of buttons) {
      const button = make("button", { type: "button", textContent: text, ariaLabel: label, title: label });
      button.addEventListener("click", act);
      group.append(button);
    }
    return group;
  }

  // Dragging zooms in, and a double click resets the zoom.
  listen() {
    this.plot.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) this.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    });
    this.plot.on("plotly_doubleclick", () => {
      this.range = null;
      this.draw();
    });
  }

  // Legend of the colours.
  keys() {
    const list = make("div", { className: "keys" });
    for (const { label, colour, hollow } of this.spec.keys) {
      const swatch = make("i", { className: hollow ? "swatch hollow" : "swatch" });
      swatch.style.setProperty("--tint", colour);
      const key = make("span", {});
      key.append(swatch, label);
      list.append(key);
    }
    return list;
  }

  axisSwitch() {
    const labels = this.spec.axes.map(({ label }) => label);
    return choice("Horizontal axis", labels, this.axis.label, (label) => {
      this.axis = this.spec.axes.find((axis) => axis.label === label);
      this.draw();
    });
  }

  repeatChoice(repeats) {
    const select = make("select", {});
    for (const repeat of repeats) select.append(new Option(`repeat ${repeat + 1}`, repeat));
    select.append(new Option("all repeats", "all"));
    select.addEventListener("change", () => {
      this.repeat = select.value === "all" ? "all" : Number(select.value);
      this.draw();
    });
    const label = make("label", {});
    label.append("Show ", select);
    return label;
  }

  legend() {
    const list = make("div", { className: "legend", role: "group", ariaLabel: "Strategies shown" });
    for (const { name, label, colour } of content.candidates) {
      if (!this.spec.candidates.includes(name)) continue;
      const button = make("button", { type: "button", ariaPressed: "true", title: name });
      const swatch = make("i", { className: "swatch" });
      swatch.style.setProperty("--tint", colour);
      button.append(swatch, label);
      button.addEventListener("click", () => {
        const hide = !this.hidden.delete(name);
        if (hide) this.hidden.add(name);
        button.ariaPressed = String(!hide);
        this.draw();
      });
      list.append(button);
    }
    return list;
  }

  // Plotly's own legend would show the stripes of coinciding curves; a plain line of each colour is clearer.
  legendEntries() {
    const listed = ({ name }) => this.spec.candidates.includes(name) && !this.hidden.has(name);
    const shown = this.spec.keys || content.candidates.filter(listed);
    const entry = { type: "scatter", mode: "lines", x: [null], y: [null], showlegend: true };
    return shown.map(({ label, colour }) => ({ ...entry, name: escaped(label), line: { color: colour, width: 3 } }));
  }

  // Saved plots are meant for documents: light, on white, with the title and the legend that the page shows around them.
  async save(format) {
    const { data, layout } = this.contents(theme.colours("light"), SAVED_WIDTH);
    const margin = layout.margin;
    layout.paper_bgcolor = "#ffffff";
    const shown = this.view ? `: ${[this.view.group, this.view.label].filter(Boolean).map(escaped).join(", ")}` : "";
    layout.title = { text: this.spec.title + shown, x: 0, xref: "paper", xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { t: 14 } };
    layout.title.font = { size: 16, color: theme.colours("light")["@ink"] };
    if (this.spec.candidates || this.spec.keys) {
      const above = margin.t / (layout.height - margin.t - margin.b); // Leaves room for the headings of panels.
      for (const trace of data) trace.showlegend = false;
      data.push(...this.legendEntries());
      layout.showlegend = true;
      layout.legend = { orientation: "h", y: 1 + above, yanchor: "bottom", x: 0, traceorder: "normal" };
      layout.height += 28;
      margin.t += 28;
    }
    layout.height += 34;
    margin.t += 34;
    const size = { width: SAVED_WIDTH, height: layout.height, scale: format === "png" ? 2 : 1 };
    layout.width = size.width;
    const address = await Plotly.toImage({ data, layout }, { format, ...size });
    const link = make("a", { href: address, download: `paceline-${this.element.dataset.figure}.${format}` });
    link.click();
  }
}

// Replaces the tokens of theme colours; strings that only contain a token stay unchanged.
function recoloured(value, colours) {
  if (typeof value === "string") return Object.hasOwn(colours, value) ? colours[value] : value;
  if (Array.isArray(value)) return value.map((item) => recoloured(item, colours));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, recoloured(item, colours)]));
  }
  return value;
}

// A control that selects one of several texts: buttons where they fit, else a list.
function choice(name, texts, chosen, choose) {
  if (texts.length > MOST_BUTTONS) {
    const select = make("select", { ariaLabel: name });
    for (const text of texts) select.append(new Option(text, text, text === chosen, text === chosen));
    select.addEventListener("change", () => choose(select.value));
    return select;
  }
  const group = make("div", { className: "switch", role: "group", ariaLabel: name });
  for (const text of texts) {
    const button = make("button", { type: "button", textContent: text, ariaPressed: String(text === chosen) });
    button.addEventListener("click", () => {
      for (const other of group.children) other.ariaPressed = String(other === button);
      choose(text);
    });
    group.append(button);
  }
  return group;
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); // Plotly interprets some HTML.
}

function make(name, properties) {
  return Object.assign(document.createElement(name), properties);
}

const figures = [...document.querySelectorAll("[data-figure]")].map(
  (element) => new Figure(element, content.figures[element.dataset.figure]),
);
theme.whenChanged(() => figures.forEach((figure) => figure.draw()));
