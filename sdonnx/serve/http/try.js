"use strict";

const element = (id) => document.getElementById(id);
const texts = ["prompt", "negative_prompt", "model", "size", "scheduler"];
const numbers = ["n", "num_inference_steps", "guidance_scale", "seed"];
const weights = {
  control_image: "controlnet_conditioning_scale",
  adapter_image: "adapter_conditioning_scale",
  ip_adapter_image: "ip_adapter_scale",
};
const maxRows = 8;
let running = null;
let models = [];
let loras = [];

function headers() {
  const key = element("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function show(message, isError = false) {
  element("status").textContent = message;
  element("status").className = isError ? "error" : "";
}

async function list(path) {
  const response = await fetch(path, { headers: headers() });
  return response.ok ? (await response.json()).data : null;
}

async function listModels() {
  const found = await Promise.all([list("v1/models"), list("v1/loras")]);
  if (!found[0] || !found[1]) return;
  [models, loras] = found;
  element("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  showInputs();
}

function inputs() {
  return models.find((model) => model.id === element("model").value)?.inputs;
}

function labelled(text, control, name) {
  control.dataset.part = name;
  const label = document.createElement("label");
  label.append(`${text} `, control);
  return label;
}

function number(placeholder) {
  const made = document.createElement("input");
  Object.assign(made, { type: "number", step: "any", placeholder });
  return made;
}

function choice(id) {
  if (id === "loras") {
    const select = document.createElement("select");
    select.append(new Option("none", ""), ...loras.map((lora) => new Option(lora.id, lora.id)));
    return select;
  }
  const file = document.createElement("input");
  Object.assign(file, { type: "file", accept: "image/png,image/jpeg,image/webp" });
  return file;
}

// Another row appears once the last one is used.
function addRow(id) {
  const rows = element(id).querySelectorAll(".row");
  if (rows.length >= maxRows) return;
  const row = document.createElement("div");
  row.className = "row";
  const chosen = choice(id);
  chosen.addEventListener("change", () => {
    if (chosen.value && row === element(id).lastElementChild) addRow(id);
  });
  row.append(labelled(id === "loras" ? "Name" : "File", chosen, "choice"), labelled("Weight", number("1"), "weight"));
  if (id === "control_image" && (inputs() ?? ["control_mode"]).includes("control_mode")) {
    row.append(labelled("Type", number("none"), "type"));
  }
  element(id).append(row);
}

function showInputs() {
  for (const id of ["loras", ...Object.keys(weights)]) {
    const list = element(id);
    // A server that does not know the inputs of its models refuses those that they lack.
    list.hidden = id === "loras" ? !loras.length : !(inputs() ?? Object.keys(weights)).includes(id);
    list.replaceChildren(list.querySelector("legend"));
    if (!list.hidden) addRow(id);
  }
}

function chosenRows(id) {
  const part = (row, name) => row.querySelector(`[data-part=${name}]`);
  return [...element(id).querySelectorAll(".row")]
    .filter((row) => part(row, "choice").value)
    .map((row) => ({
      name: part(row, "choice").value,
      file: part(row, "choice").files?.[0],
      weight: Number(part(row, "weight").value || 1),
      type: part(row, "type")?.value,
    }));
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// Return the images next to the prompt, and add their numbers and the LoRAs to the fields.
function addRows(fields) {
  const files = {};
  const names = chosenRows("loras");
  if (names.length) fields.loras = Object.fromEntries(names.map(({ name, weight }) => [name, weight]));
  for (const [id, weight] of Object.entries(weights)) {
    const rows = chosenRows(id);
    if (!rows.length) continue;
    files[id] = rows.map((row) => row.file);
    fields[weight] = rows.map((row) => row.weight);
    if (rows.some((row) => row.type)) fields.control_mode = rows.map((row) => Number(row.type));
  }
  return files;
}

async function request() {
  const fields = { stream: true, partial_images: 3, stream_progress: true };
  for (const name of texts) if (element(name).value) fields[name] = element(name).value;
  for (const name of numbers) if (element(name).value) fields[name] = Number(element(name).value);
  const options = { method: "POST", signal: running.signal };
  const files = addRows(fields);
  const image = element("image").files[0];
  if (!image) {
    for (const [name, each] of Object.entries(files)) fields[name] = await Promise.all(each.map(dataUrl));
    return fetch("v1/images/generations", {
      ...options, headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(fields),
    });
  }
  const form = new FormData();
  if (fields.loras) fields.loras = JSON.stringify(fields.loras);
  for (const [name, value] of Object.entries({ ...fields, ...files })) {
    for (const each of [value].flat()) form.append(name, each);
  }
  if (element("strength").value) form.append("strength", element("strength").value);
  form.append("image", image);
  if (element("mask").files[0]) form.append("mask", element("mask").files[0]);
  return fetch("v1/images/edits", { ...options, headers: headers(), body: form });
}

function place(index) {
  const images = element("images");
  while (images.children.length <= index) {
    const figure = document.createElement("figure");
    figure.append(document.createElement("img"), document.createElement("figcaption"));
    images.append(figure);
  }
  return images.children[index];
}

function receive(event) {
  if (event.error) throw new Error(event.error.message);
  if (event.type.endsWith(".progress")) {
    element("progress").value = event.step / event.steps;
    show(`step ${event.step} of ${event.steps}`);
    return;
  }
  const figure = place(event.image_index);
  const [image, caption] = figure.children;
  image.src = `data:image/${event.output_format};base64,${event.b64_json}`;
  const isDone = event.type.endsWith(".completed");
  image.alt = element("prompt").value;
  caption.textContent = isDone ? `${event.size}, seed ${event.seed}${event.flagged ? ", flagged" : ""}` : "preview";
  figure.dataset.state = isDone ? "completed" : "preview";
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice("data: ".length));
    }
  }
}

element("form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  running = new AbortController();
  element("start").disabled = true;
  element("stop").disabled = false;
  element("images").replaceChildren();
  element("progress").value = 0;
  show("waiting");
  try {
    const response = await request();
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) receive(event);
    show("done");
  } catch (error) {
    show(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  element("start").disabled = false;
  element("stop").disabled = true;
});

element("stop").addEventListener("click", () => running.abort());
element("key").addEventListener("change", listModels);
element("model").addEventListener("change", showInputs);
listModels();
