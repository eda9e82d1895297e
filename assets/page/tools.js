// The MCP servers of the server: their tools, which of them are offered to the model, and which run without asking.
//
// "Always" is kept in this page alone, and ends when a server's tools change. What servers say of themselves becomes text.

import { byId, button, count, el } from "./dom.js";
import { json } from "./server.js";
import { settings } from "./settings.js";

const LOOK_MS = 1000;

class McpTools {
  #servers = [];
  #tools = new Map();
  // "server tool" of what runs without asking.
  #always = new Set();
  #problem = "";
  // Whether the server has said what there is.
  #isKnown = false;
  #timer = 0;

  // Called when the tools have changed.
  onChange = () => {};

  // Asks the server what there is now. Without MCP servers it is asked once; what fails is shown in the settings.
  async renew({ isFirst = false, signal } = {}) {
    if (!isFirst && this.#isKnown && this.#servers.length === 0) return;
    const before = this.#signature();
    try {
      const { servers, tools } = await json("v1/mcp", { signal });
      this.#take(servers, tools);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.#problem = error.message;
    }
    this.#show();
    if (before !== this.#signature()) this.onChange();
  }

  #take(servers, tools) {
    const known = (server) => JSON.stringify([...this.#tools.values()].filter((tool) => tool.server === server));
    const before = new Map(this.#servers.map(({ name }) => [name, known(name)]));
    this.#servers = servers;
    this.#tools = new Map(tools.map((tool) => [tool.name, tool]));
    this.#problem = "";
    this.#isKnown = true;
    const isOther = (server) => before.get(server) !== known(server);
    for (const { name } of servers.filter((server) => isOther(server.name))) this.#forget(name);
  }

  #signature() {
    return JSON.stringify([this.#servers, [...this.#tools.values()], this.#problem]);
  }

  #forget(server) {
    for (const key of this.#always) if (key.startsWith(`${server} `)) this.#always.delete(key);
  }

  // The tools in OpenAI's form; none if the settings say so.
  definitions() {
    if (settings.mcp === "") return [];
    return [...this.#tools.values()].map(({ name, description, parameters }) => ({ type: "function", function: { name, description, parameters } }));
  }

  // The server and the tool that a call means, also one that is not there now; null for a tool of the user's own.
  meant(name) {
    const tool = this.#tools.get(name);
    if (tool) return { server: tool.server, tool: tool.tool };
    const end = name.indexOf("__");
    const server = name.slice(0, Math.max(end, 0));
    return this.#servers.some((known) => known.name === server) ? { server, tool: name.slice(end + 2) } : null;
  }

  // A tool that is not there now, or not offered, never runs without asking.
  isAlways(name) {
    const tool = this.#tools.get(name);
    return tool !== undefined && settings.mcp !== "" && this.#always.has(`${tool.server} ${tool.tool}`);
  }

  allowAlways(name) {
    const tool = this.#tools.get(name);
    if (tool) this.#always.add(`${tool.server} ${tool.tool}`);
    this.#show();
  }

  // The result of a call: {status, text}.
  call(name, given, signal) {
    return json(`v1/mcp/tools/${encodeURIComponent(name)}`, { method: "POST", body: { arguments: given }, signal });
  }

  // In the settings ----------------------------------------------------------------------------------------------------------

  #show() {
    byId("mcp-settings").hidden = this.#servers.length === 0 && this.#problem === "";
    byId("mcp-problem").textContent = this.#problem;
    byId("mcp-problem").hidden = this.#problem === "";
    const isOpen = new Set([...byId("mcp-list").querySelectorAll("details[open]")].map((details) => details.dataset.server));
    byId("mcp-list").replaceChildren(...this.#servers.map((server) => this.#row(server, isOpen.has(server.name))));
    this.#lookAgain();
  }

  // A server that is starting is looked at until it has, as long as the settings are open.
  #lookAgain() {
    clearTimeout(this.#timer);
    const isStarting = this.#servers.some((server) => server.state === "starting");
    if (isStarting && byId("settings-dialog").open) this.#timer = setTimeout(() => this.renew(), LOOK_MS);
  }

  #row({ name, state, about, reason }, isOpen) {
    const tools = [...this.#tools.values()].filter((tool) => tool.server === name);
    const number = tools.length === 1 ? "1 tool" : `${count(tools.length)} tools`;
    const says = state === "running" ? `running, ${number}` : state === "down" ? `down: ${reason}` : state;
    const summary = el("summary", {}, el("code", {}, name), ` ${says}`, about && ` (${about})`);
    if (tools.length === 0) return el("li", {}, el("p.server", {}, ...summary.childNodes));
    const details = el("details.fold", { open: isOpen }, summary, el("ul", {}, ...tools.map((tool) => this.#toolRow(tool))));
    details.dataset.server = name;
    return el("li", {}, details);
  }

  #toolRow(tool) {
    const ask = () => {
      this.#always.delete(`${tool.server} ${tool.tool}`);
      this.#show();
      byId("settings-dialog").querySelector("[name=mcp]").focus();
    };
    const always = this.isAlways(tool.name) && el("span.always", {}, " Runs without asking. ", button("Ask again", ask, { className: "link" }));
    return el("li", {}, el("code", {}, tool.tool), tool.description !== "" && ` ${tool.description}`, always);
  }
}

export const mcp = new McpTools();
