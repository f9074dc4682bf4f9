// Small curve of a run in the list of runs, requested when its row becomes visible.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Sparkline } from "./answers";
import { useAnswer } from "./api";
import { number } from "./format";

const WIDTH = 120;
const HEIGHT = 30;

export function Spark({ id, run }: { id: string; run: string }) {
  const place = useRef<HTMLSpanElement>(null);
  const [seen, see] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && see(true));
    watch.observe(place.current as HTMLSpanElement);
    return () => watch.disconnect();
  }, []);
  const { answer } = useAnswer<Sparkline>(seen ? `/runs/${id}/sparkline` : null, id);
  return (
    <span class="spark" ref={place}>
      {answer && answer.values.length > 1 ? <Line found={answer} run={run} /> : null}
    </span>
  );
}

function Line({ found, run }: { found: Sparkline; run: string }) {
  const { steps, values } = found;
  const [first, last] = [steps[0] as number, steps.at(-1) as number];
  const low = Math.min(...values);
  const high = Math.max(...values);
  const x = (step: number) => 1 + ((WIDTH - 2) * (step - first)) / (last - first || 1);
  const y = (value: number) => HEIGHT - 3 - ((HEIGHT - 6) * (value - low)) / (high - low || 1);
  const points = steps.map((step, at) => `${x(step).toFixed(1)},${y(values[at] as number).toFixed(1)}`).join(" ");
  return (
    <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`${found.title} of ${run}: from ${number(values[0], 3)} to ${number(found.last, 3)} over ${number(last)} steps`}>
      <polyline points={points} />
    </svg>
  );
}
