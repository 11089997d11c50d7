"use strict";

const element = (id) => document.getElementById(id);
const texts = ["prompt", "negative_prompt", "model", "size", "scheduler"];
const numbers = ["n", "num_inference_steps", "guidance_scale", "seed"];
let running = null;

function headers() {
  const key = element("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function show(message, isError = false) {
  element("status").textContent = message;
  element("status").className = isError ? "error" : "";
}

async function listModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return;
  element("model").replaceChildren(...(await response.json()).data.map((model) => new Option(model.id, model.id)));
}

function request() {
  const fields = { stream: true, partial_images: 3, stream_progress: true };
  for (const name of texts) if (element(name).value) fields[name] = element(name).value;
  for (const name of numbers) if (element(name).value) fields[name] = Number(element(name).value);
  const options = { method: "POST", signal: running.signal };
  const image = element("image").files[0];
  if (!image) {
    return fetch("v1/images/generations", {
      ...options, headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(fields),
    });
  }
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
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
listModels();
