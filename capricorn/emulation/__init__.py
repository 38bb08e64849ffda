"""Scale models of clusters: networks of namespaces, paced links and paced computing. Knows no trainer."""
