// Draws the figures in the colours of the page's scheme, and again when the scheme changes.
(() => {
  "use strict";

  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  // Dragging and zooming are disabled, so that a touch on a plot scrolls the page.
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };

  const theme = () => {
    const style = getComputedStyle(document.documentElement);
    const named = ["ink", "muted", "rule", "paper", "raised"];
    return Object.fromEntries(named.map((name) => ["@" + name, style.getPropertyValue("--" + name).trim()]));
  };

  // Only keys that end in "color" are replaced: an engine may be called "@ink".
  const coloured = (value, colours, key = "") => {
    if (Array.isArray(value)) return value.map((each) => coloured(each, colours, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, coloured(each, colours, name)]));
    }
    return key.endsWith("color") && Object.hasOwn(colours, value) ? colours[value] : value;
  };

  const template = (colours) => {
    const axis = {
      color: colours["@muted"],
      gridcolor: colours["@rule"],
      zerolinecolor: colours["@rule"],
      zerolinewidth: 1,
      linecolor: colours["@rule"],
      fixedrange: true,
      title: { standoff: 8, font: { size: 12.5, color: colours["@muted"] } },
    };
    return {
      layout: {
        font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colours["@ink"] },
        paper_bgcolor: colours["@paper"],
        plot_bgcolor: colours["@paper"],
        barmode: "overlay",
        dragmode: false,
        hovermode: "closest",
        hoverlabel: { bgcolor: colours["@raised"], bordercolor: colours["@rule"], font: { color: colours["@ink"] } },
        showlegend: false,
        xaxis: axis,
        yaxis: { ...axis, tickfont: { color: colours["@ink"] } },
      },
    };
  };

  const narrow = matchMedia("(max-width: 40rem)");

  const draw = () => {
    const colours = theme();
    for (const plot of plots) {
      const { data, layout } = figures[Number(plot.dataset.figure)];
      const themed = { ...coloured(layout, colours), template: template(colours), autosize: true };
      if (plot.clientWidth < 420 && themed.xaxis.nticks) themed.xaxis.nticks = 3;
      Plotly.react(plot, coloured(data, colours), themed, config);
    }
  };

  const resized = () => plots.forEach((plot) => Plotly.Plots.resize(plot));

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  // Printing uses the light scheme and the paper's width.
  matchMedia("print").addEventListener("change", () => { draw(); resized(); });
})();
