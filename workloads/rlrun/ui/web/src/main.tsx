import { render } from "preact";
import { App } from "./app";
import { apply } from "./theme";
import "./style.css";

apply();
render(<App />, document.getElementById("page") as HTMLElement);
