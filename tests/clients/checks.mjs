// Runs the checks of one client, functions that throw where the server is wrong. Prints one line per check and ends with the number
// that passed, which tests/serve_clients.rs reads.
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    await check();
    console.log("ok", name);
  }
  console.log(`${Object.keys(checks).length} passed`);
}
