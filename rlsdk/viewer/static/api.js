// JSON requests to the server; errors carry the server's message.

export class ApiError extends Error {}

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams()
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value)
  }
  const response = await fetch(`api/${path}${query.size ? `?${query}` : ""}`, { signal })
  return read(response)
}

export async function post(path, content) {
  const response = await fetch(`api/${path}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content),
  })
  return read(response)
}

async function read(response) {
  const content = await response.json().catch(() => ({}))
  if (!response.ok) throw new ApiError(content.error ?? `the server answered ${response.status}`)
  return content
}
