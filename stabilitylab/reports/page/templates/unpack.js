"use strict";
// What is stored deflated (zlib) in base 64: the plots' library, and the cells of maps.
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new DecompressionStream("deflate"), writer = stream.writable.getWriter();
  writer.write(bytes);
  writer.close();
  return new Uint8Array(await new Response(stream.readable).arrayBuffer());
}

// Plots wait for it; the layers, sentences and tables do not.
const library = inflated(document.getElementById("plotly").textContent).then((bytes) => {
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(bytes);
  document.head.append(script);
});

// Differences modulo 2^16, low bytes before high bytes, deflated: back to codes, once.
async function unpacked(map) {
  if (!map.codes) {
    const planes = await inflated(map.cells), count = planes.length / 2, codes = new Uint16Array(count);
    for (let i = 0, sum = 0; i < count; i++) codes[i] = sum = (sum + planes[i] + 256 * planes[count + i]) & 65535;
    map.codes = codes;
    delete map.cells;
  }
  return map.codes;
}
