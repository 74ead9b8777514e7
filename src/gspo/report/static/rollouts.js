"use strict";
// The rollout browser: a list of all groups of a run with filter and search; only visible rows are in the page.

G.Rollouts = class {
  constructor(source, name) {
    Object.assign(this, {
      source,
      name,
      groups: [],
      shown: [],
      count: 0,
      known: new Set(),
      generation: 0,
      matches: null,
      scan: 0,
      selected: null,
    });
    this.rowHeight = 58;
    this.build();
  }

  build() {
    const change = () => this.filter();
    const steps = async () => {
      await this.readRange(this.from.value, this.to.value);
      this.filter();
    };
    const field = (label, control) => G.h("label", { class: "field" }, G.h("span", {}, label), control);
    this.query = G.h("input", {
      type: "search",
      placeholder: "question, answer, uid",
      "aria-label": "Search rollouts",
      autocomplete: "off",
      spellcheck: "false",
      oninput: G.debounce(150, change),
    });
    this.deep = G.h("input", { type: "checkbox", onchange: change });
    this.fate = G.h("select", { onchange: change });
    this.origin = G.h("select", { onchange: change });
    this.from = G.h("input", { type: "number", min: "0", class: "short", oninput: G.debounce(200, steps) });
    this.to = G.h("input", { type: "number", min: "0", class: "short", oninput: G.debounce(200, steps) });
    this.partial = G.h("p", { class: "note", hidden: true });
    this.order = G.h(
      "select",
      { onchange: change },
      [
        ["newest", "newest first"],
        ["oldest", "oldest first"],
        ["hardest", "hardest first"],
        ["easiest", "easiest first"],
        ["longest", "longest first"],
      ].map(([v, t]) => G.h("option", { value: v }, t)),
    );
    this.originField = field("Source", this.origin);
    this.status = G.h("p", { class: "note count", role: "status" });
    this.spacer = G.h("div", { class: "spacer" });
    this.list = G.h(
      "div",
      {
        class: "list",
        tabindex: "0",
        role: "listbox",
        "aria-label": "Groups",
        onscroll: () => this.paint(),
        onkeydown: (e) => this.key(e),
      },
      this.spacer,
    );
    this.detail = G.h(
      "div",
      { class: "detail", tabindex: "-1", "aria-live": "off" },
      G.h("p", { class: "empty" }, "Choose a group to read its responses."),
    );
    this.element = G.h(
      "div",
      { class: "browser" },
      G.h(
        "div",
        { class: "filters", role: "search" },
        field("Search", this.query),
        G.h("label", { class: "check" }, this.deep, "in responses too"),
        field("Fate", this.fate),
        this.originField,
        field("Steps from", this.from),
        field("to", this.to),
        field("Order", this.order),
      ),
      this.source.note && G.h("p", { class: "note" }, this.source.note),
      this.partial,
      this.status,
      G.h("div", { class: "panes" }, this.list, this.detail),
    );
    new ResizeObserver(() => this.paint()).observe(this.list);
  }

  add(entries, generation, reset) {
    if (reset) {
      this.groups = [];
      this.known = new Set();
      this.count = 0;
    }
    this.generation = generation;
    for (const entry of entries) {
      if (this.known.has(`${entry.kind}-${entry.step}`)) continue;
      this.known.add(`${entry.kind}-${entry.step}`);
      this.count++;
      entry.groups.forEach((g, at) =>
        this.groups.push({
          ...g,
          step: entry.step,
          kind: entry.kind,
          at,
          plain: `${g.question}\n${g.truth}\n${g.uid}`.toLowerCase(),
        }),
      );
    }
    const scores = this.groups.map((g) => g.score).filter((v) => v !== null);
    this.range = scores.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
    this.options(this.fate, [...new Set(this.groups.map((g) => g.fate))], "all", (f) => G.fate(f).label);
    const sources = [...new Set(this.groups.map((g) => g.source))];
    this.options(this.origin, sources, "all", (s) => s);
    this.originField.hidden = sources.length < 2;
    this.filter(true);
  }

  // Says when only some steps are listed; those of a range are read when it is typed.
  listed(answer) {
    this.partial.hidden = !(answer.num_listed < answer.num_steps);
    if (!this.partial.hidden)
      this.partial.textContent =
        `Listed are ${answer.num_listed.toLocaleString("en")} of ${answer.num_steps.toLocaleString("en")} ` +
        "step files, evenly spaced. Enter a range of steps to list others.";
  }

  async readRange(from, to) {
    if (this.partial.hidden || (from === "" && to === "")) return;
    const last = to === "" ? +from + 199 : +to;
    const first = from === "" ? Math.max(0, last - 199) : +from;
    const { entries } = await this.source.indexRange(this.name, first, last);
    this.add(G.decodeIndex(entries), this.generation, false);
  }

  options(select, values, first, label) {
    const wanted = ["", ...values.sort()];
    if (wanted.join("\n") === [...select.options].map((o) => o.value).join("\n")) return;
    const current = this.pending && select === this.fate ? this.pending : select.value;
    G.replace(
      select,
      wanted.map((v) => G.h("option", { value: v }, v ? label(v) : first)),
    );
    select.value = wanted.includes(current) ? current : "";
  }

  candidates() {
    const fate = this.fate.value,
      origin = this.origin.value;
    const from = this.from.value === "" ? -Infinity : +this.from.value,
      to = this.to.value === "" ? Infinity : +this.to.value;
    return this.groups.filter(
      (g) => (!fate || g.fate === fate) && (!origin || g.source === origin) && g.step >= from && g.step <= to,
    );
  }

  filter(keep) {
    const query = this.query.value.trim().toLowerCase();
    const pool = this.candidates();
    const job = ++this.scan;
    this.found = query ? pool.filter((g) => g.plain.includes(query)) : pool;
    this.sort();
    this.note = "";
    if (query && this.deep.checked) this.searchTexts(query, pool, job);
    if (!keep) {
      this.list.scrollTop = 0;
      G.address.write({ q: query, fate: this.fate.value });
    }
    this.paint();
  }

  sort() {
    const rate = (g, missing) => g.rate ?? g.score ?? missing;
    const within = (a, b) => (a.kind === b.kind ? a.at - b.at : a.kind === "train" ? -1 : 1);
    const by = {
      newest: (a, b) => b.step - a.step || within(a, b),
      oldest: (a, b) => a.step - b.step || within(a, b),
      hardest: (a, b) => rate(a, Infinity) - rate(b, Infinity) || b.step - a.step,
      easiest: (a, b) => rate(b, -Infinity) - rate(a, -Infinity) || b.step - a.step,
      longest: (a, b) => b.tokens / (b.n || 1) - a.tokens / (a.n || 1),
    }[this.order.value];
    this.shown = [...this.found].sort(by);
  }

  // Reads the texts step by step, newest first, and shows what it finds as it goes.
  async searchTexts(query, pool, job) {
    const found = new Set(this.found);
    const bySteps = new Map();
    for (const group of pool) {
      if (found.has(group) || !this.source.has(group.kind, group.step)) continue;
      const key = `${group.kind}-${group.step}`;
      if (!bySteps.has(key)) bySteps.set(key, []);
      bySteps.get(key).push(group);
    }
    const work = [...bySteps.values()].reverse();
    let last = performance.now();
    for (let i = 0; i < work.length; i++) {
      const [first] = work[i];
      const text = await this.source.groupsText(this.name, first.kind, first.step);
      if (job !== this.scan) return;
      if (text.toLowerCase().includes(JSON.stringify(query).slice(1, -1))) {
        const records = G.parseLines(text);
        for (const group of work[i]) {
          const record = records[group.at];
          if (record && record.responses.some((r) => (r.text || "").toLowerCase().includes(query)))
            found.add(group);
        }
      }
      if (performance.now() - last > 120 || i === work.length - 1) {
        last = performance.now();
        this.found = [...found];
        this.note = i < work.length - 1 ? ` · reading texts, ${i + 1} of ${work.length} steps` : "";
        this.sort();
        this.paint();
        await new Promise((go) => setTimeout(go));
        if (job !== this.scan) return;
      }
    }
  }

  paint() {
    this.status.textContent = `${this.shown.length.toLocaleString("en")} of ${this.groups.length.toLocaleString("en")} groups${this.note || ""}`;
    const { rowHeight, list, spacer } = this;
    spacer.style.height = this.shown.length * rowHeight + "px";
    const first = Math.max(0, Math.floor(list.scrollTop / rowHeight) - 6);
    const last = Math.min(this.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / rowHeight) + 6);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this.row(this.shown[i], i));
    spacer.replaceChildren(...rows);
    if (!this.shown.length)
      spacer.append(
        G.h("p", { class: "empty" }, this.groups.length ? "No group matches." : "No groups yet."),
      );
  }

  // From 0 to 1: the share of right responses, else where the mean reward lies among those of all groups.
  level(group) {
    if (group.rate !== null) return group.rate;
    if (group.score === null) return 0;
    const [low, high] = this.range;
    return high > low ? (group.score - low) / (high - low) : 0.5;
  }

  row(group, i) {
    const fate = G.fate(group.fate);
    const chosen = group === this.selected;
    const dot = G.h("span", { class: "dot" });
    dot.style.background = G.css(fate.color);
    const meter = G.h("span", { class: "meter", "aria-hidden": "true" }, G.h("span", {}));
    meter.firstChild.style.width = 100 * this.level(group) + "%";
    const row = G.h(
      "div",
      {
        class: "row" + (chosen ? " chosen" : ""),
        role: "option",
        id: `row-${i}`,
        "aria-selected": chosen ? "true" : "false",
        "aria-setsize": this.shown.length,
        "aria-posinset": i + 1,
        onclick: () => this.open(group, true),
      },
      G.h("div", { class: "line" }, dot, G.h("span", { class: "q" }, group.question || group.uid)),
      G.h(
        "div",
        { class: "line meta" },
        G.h("span", {}, `step ${group.step}`),
        G.h("span", {}, fate.label),
        meter,
        G.h(
          "span",
          {},
          group.rate !== null
            ? `${G.number(group.rate * group.n, 3)}/${group.n} right`
            : group.score === null
              ? "no score"
              : `mean reward ${G.number(group.score, 3)}`,
        ),
        G.h("span", { class: "right" }, `${group.tokens.toLocaleString("en")} tok`),
      ),
    );
    row.style.transform = `translateY(${i * this.rowHeight}px)`;
    if (chosen) this.list.setAttribute("aria-activedescendant", row.id);
    return row;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / this.rowHeight) - 1);
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[
      event.key
    ];
    if (move === undefined) return;
    event.preventDefault();
    this.step(move);
  }

  step(move) {
    if (!this.shown.length) return;
    const at = this.shown.indexOf(this.selected);
    const next = Math.max(0, Math.min(this.shown.length - 1, at < 0 ? 0 : at + move));
    this.reveal(next);
    this.open(this.shown[next], false);
  }

  reveal(i) {
    const top = i * this.rowHeight,
      { list } = this;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + this.rowHeight > list.scrollTop + list.clientHeight)
      list.scrollTop = top + this.rowHeight - list.clientHeight;
  }

  async open(group, byPointer) {
    this.selected = group;
    this.paint();
    G.address.write({ step: group.step, group: group.uid, kind: group.kind === "eval" ? "eval" : "" });
    const records = this.source.has(group.kind, group.step)
      ? G.parseLines(await this.source.groupsText(this.name, group.kind, group.step))
      : null;
    if (this.selected !== group) return;
    G.replace(
      this.detail,
      records === null
        ? G.h(
            "p",
            { class: "empty" },
            `The texts of step ${group.step} are not in this file. Run "gspo dashboard" on the runs folder to read them.`,
          )
        : records[group.at]
          ? G.detail(records[group.at], group, this)
          : G.h("p", { class: "empty" }, "This group can no longer be read from the run folder."),
    );
    this.detail.scrollTop = 0;
    if (byPointer && matchMedia("(max-width: 760px)").matches) this.detail.scrollIntoView({ block: "start" });
  }

  // Opens the group of an address such as #step=12&group=uid; returns false when the group is not known yet.
  follow(address) {
    if (address.q && !this.query.value) this.query.value = address.q;
    if (address.fate) {
      this.pending = address.fate;
      this.fate.value = address.fate;
    }
    if (address.q || address.fate) this.filter(true);
    if (!address.step) return false;
    const kind = address.kind === "eval" ? "eval" : "train";
    const group = this.groups.find(
      (g) => g.step === +address.step && g.kind === kind && (!address.group || g.uid === address.group),
    );
    if (!group && !this.partial.hidden && this.asked !== address.step) {
      this.asked = address.step;
      this.readRange(address.step, address.step).then(() => this.follow(address));
    }
    if (!group || group === this.selected) return Boolean(group);
    const at = this.shown.indexOf(group);
    if (at >= 0) this.list.scrollTop = Math.max(0, at - 2) * this.rowHeight;
    this.open(group, false);
    return true;
  }
};
