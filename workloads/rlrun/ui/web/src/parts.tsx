// Small components that all pages share.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Asked } from "./api";

/** Heading of a page; it gets the focus, so that screen readers and the keyboard start there. */
export function Title({ children }: { children: ComponentChildren }) {
  const place = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    if (document.activeElement === document.body || document.activeElement === null) place.current?.focus({ preventScroll: true });
  }, []);
  return (
    <h1 tabIndex={-1} ref={place}>
      {children}
    </h1>
  );
}

/** Name of the page in the browser's tab, most special word first. */
export function useTitle(text: string): void {
  useEffect(() => {
    document.title = `${text} · RLRun`;
  }, [text]);
}

/** Content of a response, or the reason why there is none yet. */
export function Answered<T>({ asked, children }: { asked: Asked<T>; children: (answer: T) => ComponentChildren }) {
  if (asked.problem !== null) return <Note kind="problem">{asked.problem}</Note>;
  if (asked.answer === null) return <Note>Reading…</Note>;
  return <>{children(asked.answer)}</>;
}

export function Note({ kind = "note", children }: { kind?: "note" | "problem"; children: ComponentChildren }) {
  return (
    <p class={kind} role={kind === "problem" ? "alert" : "status"}>
      {children}
    </p>
  );
}

export function Phase({ phase }: { phase: string }) {
  return <span class={`phase ${phase.toLowerCase()}`}>{phase}</span>;
}

export function Section({ title, id, children, tools }: { title: string; id: string; children: ComponentChildren; tools?: ComponentChildren }) {
  return (
    <section aria-labelledby={id}>
      <div class="head">
        <h2 id={id}>{title}</h2>
        {tools}
      </div>
      {children}
    </section>
  );
}

/** Wide table with its own scrolling, also by keyboard. */
export function Wide({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <div class="wide" role="region" aria-label={label} tabIndex={0}>
      {children}
    </div>
  );
}

export function Facts({ facts }: { facts: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

interface FieldProps {
  label: string;
  value: string;
  put: (value: string) => void;
  type?: "number" | "text" | "search";
  id?: string;
  list?: string;
  placeholder?: string;
}

/** Input that takes effect on Enter or blur. Typed text survives rerenders of the page. */
export function Field({ label, value, put, type = "number", id, list, placeholder }: FieldProps) {
  const [typed, setTyped] = useState<string | null>(null);
  return (
    <label>
      <span>{label}</span>
      <input
        id={id}
        type={type}
        step="any"
        list={list}
        value={typed ?? value}
        placeholder={placeholder}
        onInput={(event) => setTyped(event.currentTarget.value)}
        onChange={(event) => put(event.currentTarget.value)}
        onBlur={() => setTyped(null)}
      />
    </label>
  );
}

export function Choice({ label, value, options, put }: { label: string; value: string; options: readonly (readonly [string, string])[]; put: (value: string) => void }) {
  return (
    <label>
      <span>{label}</span>
      <select value={value} onChange={(event) => put(event.currentTarget.value)}>
        {options.map(([name, text]) => (
          <option key={name} value={name} selected={name === value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}
