import { render } from "preact";
import { App } from "./app";
import { listen } from "./live";
import { apply } from "./theme";
import "./style.css";

apply();
listen();
render(<App />, document.getElementById("page") as HTMLElement);
