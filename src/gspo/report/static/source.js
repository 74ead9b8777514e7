"use strict";
// Where data comes from: blocks in this file, or the dashboard's server. Both answer the same questions.

G.parseLines = function (text) {
  const records = [];
  for (const line of text.split("\n")) {
    if (!line.trim()) continue;
    let record;
    try {
      record = JSON.parse(line);
    } catch {
      try {
        record = JSON.parse(line.replace(/([:[,]\s*)(?:NaN|-?Infinity)(?=\s*[,\]}])/g, "$1null"));
      } catch {
        continue; // half written
      }
    }
    if (record && Array.isArray(record.responses)) records.push(record);
  }
  return records;
};

G.cache = function (size) {
  const held = new Map();
  return {
    async get(key, make) {
      if (held.has(key)) {
        const value = held.get(key);
        held.delete(key);
        held.set(key, value);
        return value;
      }
      const value = make();
      held.set(key, value);
      if (held.size > size) held.delete(held.keys().next().value);
      try {
        return await value;
      } catch (error) {
        held.delete(key);
        throw error;
      }
    },
    clear: () => held.clear(),
  };
};

G.EmbeddedSource = class {
  constructor(boot) {
    this.boot = boot;
    this.live = false;
    this.note = boot.note || "";
    this.chunks = new Set(boot.chunks || []);
    this.steps = G.cache(24);
    this.complete = new Promise((done) => {
      if (document.readyState === "loading")
        document.addEventListener("DOMContentLoaded", done, { once: true });
      else done();
    });
  }
  async text(id) {
    let block = document.getElementById(id);
    if (!block) {
      await this.complete;
      block = document.getElementById(id);
    }
    if (!block) return null;
    const binary = atob(block.textContent);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }
  async overview(name) {
    return JSON.parse(await this.text(`data-overview-${this.boot.runs.indexOf(name)}`));
  }
  async index(name) {
    await this.complete;
    const text = await this.text(`data-index-${this.boot.runs.indexOf(name)}`);
    return { entries: text ? JSON.parse(text) : [], complete: true, generation: 0 };
  }
  has(kind, step) {
    return this.chunks.has(`${kind}-${step}`);
  }
  groupsText(name, kind, step) {
    return this.steps.get(`${kind}-${step}`, async () => (await this.text(`data-${kind}-${step}-0`)) || "");
  }
};

G.HttpSource = class {
  constructor() {
    this.live = true;
    this.note = "";
    this.steps = G.cache(24);
    this.tags = new Map();
  }
  async json(path) {
    const response = await fetch(path, { cache: "no-store" });
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return response.json();
  }
  // null when nothing changed since the last call; `key` names the call, `path` may include what the page has
  async changed(path, key = path) {
    const headers = this.tags.has(key) ? { "If-None-Match": this.tags.get(key) } : {};
    const response = await fetch(path, { headers, cache: "no-store" });
    if (response.status === 304) return null;
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    this.tags.set(key, response.headers.get("ETag"));
    return response.json();
  }
  // The overview if it changed. Only new metric rows are sent; they are joined to those of the page.
  async refresh(name, held) {
    const path = this.overviewPath(name);
    const fresh = await this.changed(`${path}?after=${held.columns.step.length}&epoch=${held.epoch}`, path);
    if (!fresh || !fresh.offset) return fresh;
    const rows = fresh.offset + fresh.columns.step.length;
    const names = new Set([...Object.keys(held.columns), ...Object.keys(fresh.columns)]);
    const joined = {};
    for (const metric of names) {
      const old = (held.columns[metric] || new Array(fresh.offset).fill(null)).slice(0, fresh.offset);
      joined[metric] = old.concat(fresh.columns[metric] || new Array(rows - fresh.offset).fill(null));
    }
    return { ...fresh, columns: joined };
  }
  forget(path) {
    this.tags.delete(path);
  }
  runs() {
    return this.changed("/api/runs");
  }
  overviewPath(name) {
    return `/api/run/${encodeURIComponent(name)}/overview`;
  }
  overview(name) {
    return this.json(this.overviewPath(name));
  }
  index(name, known) {
    const query = known ? `?after=${known.count}&generation=${known.generation}` : "";
    return this.json(`/api/run/${encodeURIComponent(name)}/index${query}`);
  }
  indexRange(name, from, to) {
    return this.json(`/api/run/${encodeURIComponent(name)}/index?from=${from}&to=${to}`);
  }
  has() {
    return true;
  }
  groupsText(name, kind, step) {
    return this.steps.get(`${name}/${kind}-${step}`, async () => {
      const response = await fetch(`/api/run/${encodeURIComponent(name)}/${kind}/${step}`, {
        cache: "no-store",
      });
      return response.ok ? response.text() : "";
    });
  }
};
