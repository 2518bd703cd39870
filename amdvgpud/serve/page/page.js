// What the API says, drawn. Reads only; owns no state but what it was last told.
//
// Texts of others (names of slices, reasons) only ever become text nodes, never markup. Where a CU lies is the daemon's
// to know: a line of the map is one row, as the planner deals them, so it is drawn from counts and no walk is repeated.

const PERIOD_MS = 5000; // usage changes without an event
const KEPT_EVENTS = 100;

const at = (id) => document.getElementById(id);

function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function filled(element, ...children) {
  element.append(...children);
  return element;
}

function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${Number(bytes.toFixed(bytes < 10 && unit ? 1 : 0))} ${units[unit]}`;
}

// The golden angle keeps neighbours in the list apart on the wheel, however many there are.
const colourOf = (rank) => `hsl(${Math.round(rank * 137.508) % 360} 60% 52%)`;

function meter(value, most, label) {
  const element = make("meter", label, { min: 0, max: Math.max(most, 1), value: Math.min(value, most), title: label });
  element.setAttribute("aria-label", label);
  return element;
}

function bitsOf(ranges) {
  return ranges.split(",").flatMap((range) => {
    const [first, last = first] = range.split("-").map(Number);
    return Array.from({ length: last - first + 1 }, (_, i) => first + i);
  });
}

function map(partition, slices, colours) {
  const cells = Array.from({ length: partition.cu_count }, () => make("i"));
  for (const slice of slices) {
    for (const share of slice.shares.filter((s) => s.partition === partition.id)) {
      for (const bit of share.cus === null ? cells.keys() : bitsOf(share.cus)) {
        cells[bit].style.background = colours.get(slice.name);
        cells[bit].title = cells[bit].title ? `${cells[bit].title}, ${slice.name}` : `CU ${bit}: ${slice.name}`;
      }
    }
  }
  const columns = Math.max(partition.row_cus, Math.min(32, partition.cu_count));
  const label = `${partition.cus_allocated} of ${partition.cu_count} CUs are allocated`;
  const grid = make("div", "", { class: "cus", role: "img", "aria-label": label });
  grid.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  return filled(grid, ...cells);
}

function conditionOf(gpu) {
  if (gpu.cordoned) return ["cordoned", "odd"];
  const condition = gpu.health?.condition;
  const tone = { healthy: "good", degraded: "odd", unhealthy: "bad", unknown: "odd" }[condition];
  return condition ? [gpu.health.reason ? `${condition}: ${gpu.health.reason}` : condition, tone] : ["", ""];
}

function gpuCard(gpu, slices, colours) {
  const [condition, tone] = conditionOf(gpu);
  const mode = [gpu.compute_partition, gpu.memory_partition].filter(Boolean).join(" ");
  const facts = [gpu.id, gpu.pci_address, gpu.gfx_target, mode, gpu.numa_node === null ? "" : `NUMA ${gpu.numa_node}`];
  facts.push(...Object.entries(gpu.temperatures_c).map(([sensor, degrees]) => `${sensor} ${degrees} °C`));
  const card = filled(
    make("article"),
    filled(make("h3", `${gpu.index}  ${gpu.product_name} `), make("span", condition, { class: tone })),
    make("p", facts.filter(Boolean).join(" · ")),
  );
  for (const partition of gpu.partitions) {
    const promised = `${size(partition.vram_reserved_bytes)} of ${size(partition.vram_bytes)} promised`;
    const title = gpu.partitions.length > 1 ? `Partition ${partition.index}` : "VRAM";
    card.append(
      filled(
        make("div", "", { class: "partition" }),
        filled(make("p"), make("span", title), make("span", promised)),
        meter(partition.vram_reserved_bytes, partition.vram_bytes, promised),
        filled(make("p"), make("span", "CUs"), make("span", `${partition.cus_allocated} of ${partition.cu_count}`)),
        map(partition, slices, colours),
      ),
    );
  }
  return card;
}

function sliceRow(slice, colours) {
  const sum = (key) => slice.shares.reduce((total, share) => total + share[key], 0);
  const [used, quota] = [sum("used_bytes"), sum("vram_bytes")];
  const text = `${size(used)} of ${size(quota)}`;
  const chip = make("span", "", { class: "chip" });
  chip.style.background = colours.get(slice.name);
  const state = slice.lost_reason ? `lost: ${slice.lost_reason}` : slice.state;
  return filled(
    make("tr"),
    filled(make("td"), chip, slice.name),
    make("td", state, slice.state === "lost" ? { class: "bad" } : {}),
    make("td", slice.shares.map((share) => share.partition).join(", ")),
    filled(make("td", text), meter(used, quota, text)),
    make("td", slice.shares.map((s) => `${s.asked_cus}, ${s.granted_cus}, ${s.effective_cus}`).join("; ")),
    make("td", slice.gate_seen ? `${slice.enforced_by} (seen at work)` : slice.enforced_by),
    make("td", String(slice.processes)),
  );
}

function draw(system, gpus, slices) {
  const colours = new Map(slices.map((slice, rank) => [slice.name, colourOf(rank)]));
  const simulated = system.simulated ? ` · simulated: ${system.simulated}` : "";
  at("system").textContent = `${system.version}${simulated}${system.ready ? "" : " · starting"}`;
  at("warnings").replaceChildren(...system.warnings.map((warning) => make("li", warning)));
  const cards = gpus.gpus.map((gpu) => gpuCard(gpu, slices, colours));
  cards.push(
    ...gpus.unusable.map((unusable) =>
      filled(make("article"), make("h3", unusable.pci_address ?? unusable.name), make("p", unusable.reason)),
    ),
    ...gpus.gone.map((gone) =>
      filled(make("article"), make("h3", gone.product_name ?? gone.id), make("p", `${gone.id} was here and is gone.`)),
    ),
  );
  at("gpus").replaceChildren(...(cards.length ? cards : [make("p", "No GPU that can be used.", { class: "empty" })]));
  const rows = slices.map((slice) => sliceRow(slice, colours));
  const none = filled(make("tr"), make("td", "No slices.", { class: "empty", colspan: 7 }));
  at("slices").replaceChildren(...(rows.length ? rows : [none]));
}

async function read(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer.json();
}

async function readSlices() {
  const found = [];
  for (let cursor = ""; cursor !== null; ) {
    const page = await read(`/v1/slices?limit=500${cursor && `&cursor=${encodeURIComponent(cursor)}`}`);
    found.push(...page.slices);
    cursor = page.next_cursor;
  }
  return found;
}

async function look() {
  try {
    draw(...(await Promise.all([read("/v1/system"), read("/v1/gpus"), readSlices()])));
    at("contact").textContent = "";
  } catch (error) {
    at("contact").textContent = `What is shown may be old: ${error.message}`;
  }
}

function tell(event) {
  const when = new Date(event.time_s * 1000);
  const line = filled(
    make("li"),
    make("time", when.toLocaleTimeString(), { datetime: when.toISOString() }),
    `${event.subject}: ${event.detail || event.kind}`, // details are not for everybody
  );
  at("events").prepend(line);
  while (at("events").children.length > KEPT_EVENTS) at("events").lastChild.remove();
}

async function listen() {
  let since = 0;
  for (;;) {
    try {
      const answer = await read(`/v1/events?since=${since}&wait=30s`);
      if (answer.resync) at("events").replaceChildren(); // another daemon, or too long away
      answer.events.forEach(tell);
      if (answer.events.length && since) look();
      since = answer.last_id;
    } catch {
      since = 0;
      await new Promise((wake) => setTimeout(wake, PERIOD_MS));
    }
  }
}

listen();
look();
setInterval(look, PERIOD_MS);
