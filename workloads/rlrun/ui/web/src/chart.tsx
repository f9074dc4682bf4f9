// Curves over steps. Dragging zooms, for the mouse; fields of the page do the same for the keyboard.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number } from "./format";
import { useDark } from "./theme";

export interface Curve {
  label: string;
  steps: number[];
  values: number[];
}

const LIGHT = ["#1558b0", "#b3261e", "#1b6e34", "#7b3fa0", "#8a5300", "#00696b", "#5c5c5c", "#a3285f"];
const DARK = ["#8ab4f8", "#f28b82", "#81c995", "#c58af9", "#fdb45c", "#78d9ec", "#bdbdbd", "#ff8bcb"];

export function colour(at: number, dark: boolean): string {
  const all = dark ? DARK : LIGHT;
  return all[at % all.length] as string;
}

/** Curves on one axis of steps; each may have been measured at other steps. */
function aligned(curves: Curve[]): uPlot.AlignedData {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, at) => [step, at]));
  const columns = curves.map((curve) => {
    const column = new Array<number | null>(steps.length).fill(null);
    curve.steps.forEach((step, at) => (column[places.get(step) as number] = curve.values[at] ?? null));
    return column;
  });
  return [steps, ...columns];
}

export function Chart({ title, curves, zoom }: { title: string; curves: Curve[]; zoom?: (first: number, last: number) => void }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const dark = useDark();
  const shape = JSON.stringify([curves.map((curve) => curve.label), dark]);
  const zoomed = useRef(zoom);
  zoomed.current = zoom;
  useEffect(() => {
    const where = place.current as HTMLDivElement;
    const axis: uPlot.Axis = {
      stroke: dark ? "#c3c7cf" : "#44474e",
      grid: { stroke: dark ? "#ffffff1a" : "#0000001a", width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const made = new uPlot(
      {
        width: where.clientWidth || 300,
        height: 200,
        legend: { show: false },
        cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 28 }, { ...axis, size: 58, values: (_, marks) => marks.map((mark) => number(mark)) }],
        series: [
          {},
          ...curves.map((curve, at): uPlot.Series => ({
            label: curve.label,
            stroke: colour(at, dark),
            width: 1.5,
            spanGaps: true,
            points: { show: curve.steps.length <= 40, size: 5 },
          })),
        ],
        hooks: {
          setSelect: [
            (self) => {
              if (self.select.width < 4) return;
              const [first, last] = [self.select.left, self.select.left + self.select.width].map((x) => self.posToVal(x, "x"));
              self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
              zoomed.current?.(Math.floor(first as number), Math.ceil(last as number));
            },
          ],
        },
      },
      aligned(curves),
      where,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: where.clientWidth, height: 200 }));
    watch.observe(where);
    return () => {
      watch.disconnect();
      made.destroy();
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(aligned(curves)), [curves]);
  const said = curves.map((curve) => {
    if (curve.steps.length === 0) return `${curve.label}: not measured`;
    const low = Math.min(...curve.values);
    const high = Math.max(...curve.values);
    return `${curve.label}: ${number(curve.values.at(-1))} at step ${curve.steps.at(-1)}, from ${number(low)} to ${number(high)}`;
  });
  return (
    <figure class="chart">
      <figcaption>
        <strong>{title}</strong>
        {curves.map((curve, at) => (
          <span key={curve.label} class="key">
            {curves.length > 1 && <i style={{ background: colour(at, dark) }} />}
            {curves.length > 1 ? `${curve.label} ` : ""}
            {curve.steps.length ? number(curve.values.at(-1)) : "not measured"}
          </span>
        ))}
      </figcaption>
      <div ref={place} role="img" aria-label={`${title} over steps. ${said.join("; ")}`} />
    </figure>
  );
}
