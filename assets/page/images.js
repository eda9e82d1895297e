// Images: those of the next message, shown small until it is sent, and those of the conversation.
//
// The browser sends the bytes as they are; the server decides what it reads. A session names its images by hash, also when its messages
// are sent again: one that this page has sent is shown, any other by its name and size.

import { announce, button, byId, el } from "./dom.js";

// More would not fit into a request.
const MAX_BYTES = 20 * 1024 * 1024;
// Data URLs of images that this page has sent, by hash.
const known = new Map();

const isImage = (part) => part.type === "image" || part.type === "image_url";

export function imagesOf(content) {
  return Array.isArray(content) ? content.filter(isImage) : [];
}

function urlOf(part) {
  const url = part.image_url?.url ?? part.image_url ?? known.get(part.sha256);
  return typeof url === "string" && url.startsWith("data:image/") ? url : null;
}

function nameOf(part) {
  const size = part.width ? ` ${part.width}×${part.height}` : "";
  return `${part.name ?? part.media_type ?? "image"}${size}`;
}

// The images of a message as elements; null if it has none.
export function pictures(content) {
  const views = imagesOf(content).map((part) => {
    const url = urlOf(part);
    return url ? el("img.picture", { src: url, alt: nameOf(part) }) : el("span.tag", {}, `[${nameOf(part)}]`);
  });
  return views.length > 0 ? el("div.pictures", {}, ...views) : null;
}

// Learns from the session which hashes the images have that were sent with these messages.
export function learn(sent, held) {
  const ours = sent.flatMap((message) => imagesOf(message.content));
  const theirs = held.slice(-sent.length - 1).flatMap((message) => imagesOf(message.content));
  if (ours.length !== theirs.length) return;
  theirs.forEach((part, index) => {
    const url = urlOf(ours[index]);
    if (part.sha256 && url) known.set(part.sha256, url);
  });
}

// A message with images before its text.
export function contentOf(text, images) {
  if (images.length === 0) return text;
  return [...images, ...(text === "" ? [] : [{ type: "text", text }])];
}

// The images of the next message.
export class ImageTray {
  #parts = [];
  #names = new Map();
  #failed;
  #isAllowed = false;

  constructor(failed) {
    this.#failed = failed;
    const files = byId("files");
    byId("attach").addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.#add([...files.files]);
      files.value = "";
    });
    byId("input").addEventListener("paste", (event) => this.#takeFrom(event, event.clipboardData));
    document.addEventListener("dragover", (event) => this.#hasFiles(event.dataTransfer) && event.preventDefault());
    document.addEventListener("drop", (event) => this.#takeFrom(event, event.dataTransfer));
  }

  // Whether the model that answers reads images.
  allow(isAllowed) {
    this.#isAllowed = isAllowed;
    byId("attach").hidden = !isAllowed;
    this.#show();
  }

  get isEmpty() {
    return this.#parts.length === 0;
  }

  take() {
    const parts = this.#parts;
    this.#parts = [];
    this.#show();
    return parts;
  }

  // Images of a message that was not sent.
  giveBack(parts) {
    this.#parts = [...parts, ...this.#parts];
    this.#show();
  }

  #hasFiles(transfer) {
    return this.#isAllowed && [...(transfer?.types ?? [])].includes("Files");
  }

  #takeFrom(event, transfer) {
    if (!this.#hasFiles(transfer)) return;
    const files = [...transfer.files].filter((file) => file.type.startsWith("image/"));
    // A dropped file of another kind would be opened in place of the page.
    if (event.type === "drop" || files.length > 0) event.preventDefault();
    if (event.type === "drop" && files.length === 0) this.#failed(new Error("Only images can be dropped here."));
    this.#add(files);
  }

  async #add(files) {
    for (const file of files) {
      if (file.size > MAX_BYTES) this.#failed(new Error(`${file.name} has more than 20 MiB: make it smaller.`));
      else await this.#read(file).catch(() => this.#failed(new Error(`${file.name} cannot be read.`)));
    }
  }

  async #read(file) {
    const reader = new FileReader();
    const url = await new Promise((resolve, reject) => {
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
    const part = { type: "image_url", image_url: { url } };
    this.#names.set(part, file.name);
    this.#parts.push(part);
    announce(`${file.name} goes with the next message.`);
    this.#show();
  }

  #show() {
    const row = (part) => {
      const name = this.#names.get(part) ?? "image";
      const remove = () => {
        this.#parts = this.#parts.filter((other) => other !== part);
        this.#show();
        byId("input").focus();
      };
      const picture = el("img.picture", { src: urlOf(part) ?? "", alt: name });
      return el("li", {}, picture, button("Remove", remove, { className: "quiet", "aria-label": `Remove ${name}` }));
    };
    byId("tray").replaceChildren(...this.#parts.map(row));
    byId("tray").hidden = this.isEmpty || !this.#isAllowed;
  }
}
